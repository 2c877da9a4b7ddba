"""A reference model whose weights are in memory one layer at a time, and what runs through it.

The model is built on ``meta``. A layer's parameters are read when it runs and given back afterwards, into buffers
that the next layer uses again; rows of the embedding are gathered, and the head runs in slabs of the vocabulary.
So a model of any size runs in the memory of its largest layer. The arithmetic is the reference model's own, in the same
order. This module compares nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convert.reference.loading import Opened, block_tensor, check_fit, empty_reference, homes_of, read_tensor
from convert.rounding import Change
from convert.source import Source

#: Rows of the head that are in memory at a time, and how many logits (positions times rows) at most.
SLAB_ROWS, SLAB_LOGITS = 4096, 1 << 20
#: Bytes of raw values that are held while a parameter is filled.
BLOCK_BYTES = 8 << 20


class LayeredModel:
    """A checkpoint's reference model, filled where it is used.

    ``with front(): x = embed(ids); c = context(T)``, then ``with layer(l) as block: x = block(x, c)`` for every layer,
    then ``head(x)`` for every ``head`` in ``slabs(T)`` gives the logits, a slab of the vocabulary at a time. Inside
    each ``with``, and for each head, ``change`` alters the weights at hand, for good.

    Args:
        ckpt: The opened checkpoint.
        device: Where it runs.
        dtype: Of the parameters.
        buffers: Memory that several models use in turn.

    Raises:
        ConvertError: The tensors do not fill the model exactly. Nothing has been read then.
    """

    def __init__(
        self,
        ckpt: Opened,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        buffers: Buffers | None = None,
    ) -> None:
        self.model, pairs = empty_reference(ckpt)
        self.model.eval()
        self._homes = homes_of(self.model)
        check_fit(self._homes, pairs)
        self._sources = dict(pairs)
        self.device, self.dtype = torch.empty(0, device=device).device, dtype  # "cuda" is one of several
        self.n_layers: int = self.model.n_layers
        self.vocab_size: int = self.model.vocab_size
        self.controls = self.model.controls
        self._names = {id(param): name for name, (param, _) in self._homes.items()}
        self._blocks = [self._of(self.model.block(layer)) for layer in range(self.n_layers)]
        self._head_name = self._names[id(self.model.out_head.weight)]
        self._norm = self._of(self.model.final_norm)
        self._filled: dict[str, Tensor] = {}
        self._buffers = Buffers() if buffers is None else buffers
        self._changes: list[Change] = []
        self._at_hand: list[str] = []
        tables = self._open_tables()
        rest = {*tables, *self._norm, self._head_name, *(name for block in self._blocks for name in block)}
        self._front = [name for name in self._homes if name not in rest]
        for owner in self.model.modules():
            for leaf, buffer in owner._buffers.items():
                owner._buffers[leaf] = None if buffer is None else buffer.to(self.device)

    def fill(self) -> None:
        """Read all layers now; each is given up after it has run."""
        self._buffers.keep = False
        for names in self._blocks:
            self._fill(names)

    def _of(self, module: nn.Module) -> list[str]:
        return [self._names[id(param)] for param in module.parameters()]

    def total(self) -> int:
        """Bytes of all layers."""
        return sum(map(self._bytes, self._blocks))

    def _bytes(self, names: list[str]) -> int:
        return sum(self._homes[name][0].numel() for name in names) * self.dtype.itemsize

    def _open_tables(self) -> list[str]:
        """Make every embedding look its rows up in the file; its weight is an empty stand-in."""
        names = []
        inside = {id(m) for layer in range(self.n_layers) for m in self.model.block(layer).modules()}
        for module in self.model.modules():
            if isinstance(module, nn.Embedding) and id(module) not in inside:
                name = self._names[id(module.weight)]
                names.append(name)
                module.forward = partial(self._look_up, name)  # type: ignore[method-assign]
                empty = torch.empty(0, module.embedding_dim, dtype=self.dtype, device=self.device)
                module._parameters["weight"] = nn.Parameter(empty, requires_grad=False)
        return names

    def _look_up(self, name: str, ids: Tensor) -> Tensor:
        """Rows of an embedding: ``ids`` ``[…]`` to ``[…, D]``."""
        wanted, places = ids.cpu().flatten().unique(return_inverse=True)
        rows = gather(self._sources[name], wanted, self.dtype)
        for change in self._changes:
            rows = changed(
                change,
                name,
                rows,
                lambda: gather(self._sources[name], wanted, torch.float32),
                length=self._sources[name].shape[0],
                rows=wanted,
            )
        return F.embedding(places.view(ids.shape).to(self.device), rows.to(self.device))

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids ``[1, T]`` to hidden states ``[1, T, D]``."""
        return self.model.embed(ids)

    def context(self, length: int) -> Any:
        """What the layers need to know of the positions of the ids embedded just before."""
        return self.model.context(length)

    @contextmanager
    def front(self) -> Iterator[None]:
        """While it lasts, :meth:`embed` can be called."""
        with self._at(self._front):
            yield

    @contextmanager
    def layer(self, layer: int) -> Iterator[nn.Module]:
        """While it lasts, a layer is there, called as ``block(x, context)``."""
        with self._at(self._blocks[layer]):
            yield self.model.block(layer)

    @contextmanager
    def _at(self, names: list[str]) -> Iterator[None]:
        self._changes = []
        self._at_hand = names
        self._fill(names)
        try:
            yield
        finally:
            self._release(names)
            self._at_hand, self._changes = [], []

    def change(self, change: Change) -> None:
        """Alter the weights at hand; 16-bit ones become float32 first."""
        self._changes.append(change)
        with torch.no_grad():
            for name in self._at_hand:
                self._place(name, self._changed(change, name))

    def _changed(self, change: Change, name: str) -> Tensor:
        """A parameter that is there whole, after a change."""
        stored = partial(read_tensor, self._sources[name], device=self.device, dtype=torch.float32)
        return changed(change, name, self._values(name), stored)

    def _values(self, name: str) -> Tensor:
        """What a parameter holds now."""
        owner, leaf = self._homes[name][1][0]
        held = owner._parameters[leaf]
        assert held is not None, name
        return held.detach()

    def _fill(self, names: list[str]) -> None:
        with torch.no_grad():
            for name in names:
                if name in self._filled:
                    continue
                source = self._sources[name]
                buffer = self._buffers.take(tuple(source.shape), self.dtype, self.device)
                read_tensor(source, device=self.device, dtype=self.dtype, out=buffer, block_bytes=BLOCK_BYTES)
                self._filled[name] = buffer
                self._place(name, buffer)

    def _release(self, names: list[str]) -> None:
        """Give parameters back; the next layer reads into their memory."""
        for name in names:
            self._buffers.give(self._filled.pop(name))
            for owner, leaf in self._homes[name][1]:
                owner._parameters[leaf] = self._homes[name][0]  # type: ignore[assignment]

    def _place(self, name: str, values: Tensor) -> None:
        param = nn.Parameter(values, requires_grad=False)
        for owner, leaf in self._homes[name][1]:
            owner._parameters[leaf] = param

    def slabs(self, length: int) -> Iterator[Head]:
        """The head for ``length`` positions, a slab of the vocabulary after the other; the same for every model."""
        self._buffers.clear()
        source = self._sources[self._head_name]
        rows = min(SLAB_ROWS, self.vocab_size, max(256, SLAB_LOGITS // max(length, 1)))
        norm = {name: read_tensor(self._sources[name], device="cpu", dtype=self.dtype) for name in self._norm}
        buffer = torch.empty(rows, *source.shape[1:], dtype=self.dtype, device=self.device)
        try:
            for start in range(0, self.vocab_size, rows):
                stop = min(start + rows, self.vocab_size)
                slab = buffer[: stop - start]
                with torch.no_grad():
                    slab.copy_(block_tensor(source, start, stop))
                yield Head(self, slab, start, norm)
        finally:
            self.model.out_head._parameters["weight"] = self._homes[self._head_name][0]
            for name in self._norm:
                for owner, leaf in self._homes[name][1]:
                    owner._parameters[leaf] = self._homes[name][0]  # type: ignore[assignment]


class Buffers:
    """Memory of tensors that are no longer needed, for those of the same shape that come next.

    Attributes:
        keep: Whether what is given back is kept at all.
    """

    def __init__(self) -> None:
        self.keep = True
        self._free: dict[Any, list[Tensor]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor with no particular values."""
        kept = self._free.get((shape, dtype, device))
        return kept.pop() if kept else torch.empty(shape, dtype=dtype, device=device)

    def give(self, tensor: Tensor) -> None:
        """Give a tensor back."""
        if self.keep:
            self._free.setdefault((tuple(tensor.shape), tensor.dtype, tensor.device), []).append(tensor)

    def clear(self) -> None:
        """Let go of everything."""
        self._free.clear()


class Head:
    """Final norm and some rows of the head.

    Attributes:
        start: The first token id of these rows.
        stop: The last one, plus one.
    """

    def __init__(self, model: LayeredModel, slab: Tensor, start: int, norm: Mapping[str, Tensor]) -> None:
        self._owner = model
        self._slab = slab
        self.start, self.stop = start, start + slab.shape[0]
        for name, values in norm.items():
            model._place(name, values.to(model.device, copy=True))
        self._install()

    def _install(self) -> None:
        self._owner.model.out_head._parameters["weight"] = nn.Parameter(self._slab, requires_grad=False)

    def __call__(self, x: Tensor) -> Tensor:
        """Hidden states ``[1, T, D]`` to the logits of these token ids ``[1, T, stop - start]``."""
        return self._owner.model.head(x)

    def change(self, change: Change) -> None:
        """Alter the weights at hand; 16-bit ones become float32 first."""
        owner = self._owner
        with torch.no_grad():
            for name in owner._norm:
                owner._place(name, owner._changed(change, name))
            source = owner._sources[owner._head_name]
            self._slab = changed(
                change,
                owner._head_name,
                self._slab,
                lambda: block_tensor(source, self.start, self.stop).to(owner.device, torch.float32),
                length=owner.vocab_size,
                rows=self.start,
            )
            self._install()


def gather(source: Source, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Some rows of a source, by ascending numbers ``[n]``, as a tensor ``[n, …]`` on the CPU."""
    out = torch.empty(len(rows), *source.shape[1:], dtype=dtype)
    if source.whole:
        return out.copy_(block_tensor(source, 0, source.shape[0])[rows])
    for place, row in enumerate(rows.tolist()):
        out[place].copy_(block_tensor(source, row, row + 1)[0])
    return out


def changed(change: Change, name: str, values: Tensor, stored: Callable[[], Tensor], **where: Any) -> Tensor:
    """Values of a parameter after a change: in place, but 16-bit ones become new float32.

    Args:
        change: The change.
        name: The parameter.
        values: Its values, or some of its rows.
        stored: Reads the same from the file, as float32. Values that arithmetic has rounded to 16 bits do not show
            what another storage type did to them before.
        **where: Which rows, as :meth:`Change.apply` takes it.
    """
    if values.dtype not in (torch.bfloat16, torch.float16):
        change.apply(name, values, **where)
        return values
    through = name in change.through
    wide = stored() if through else values.float()
    change.apply(name, wide, **where)
    return wide.to(values.dtype).float() if through else wide
