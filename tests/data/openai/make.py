"""How the files here and in ``../tensorflow`` were made, once, by real TensorFlow (2.21): ``python make.py FOLDER``.

The variables have the names and shapes of OpenAI's ``model.py`` for GPT-2; ``expected.npz`` holds what TensorFlow reads
back from the checkpoint, with ``|`` for ``/``. The tests need no TensorFlow.
"""

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1
V, C, D, L, H = 64, 24, 8, 2, 2
rng = np.random.default_rng(5)


def normal(*shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) * 0.2).astype(np.float32)


def gain() -> np.ndarray:
    return rng.uniform(0.5, 1.5, D).astype(np.float32)


def save(path: Path, variables: dict, **options: object) -> None:
    with tf1.Graph().as_default(), tf1.Session() as session:
        made = [tf1.get_variable(name, initializer=value) for name, value in variables.items()]
        session.run(tf1.global_variables_initializer())
        tf1.train.Saver(made, save_relative_paths=True, **options).save(session, str(path), write_meta_graph=False)


def main(out: Path) -> None:
    values = {"model/wpe": normal(C, D), "model/wte": normal(V, D)}
    for layer in range(L):
        prefix = f"model/h{layer}/"
        for name in ("ln_1", "ln_2"):
            values |= {f"{prefix}{name}/g": gain(), f"{prefix}{name}/b": normal(D)}
        sizes = {"attn/c_attn": (D, 3 * D), "attn/c_proj": (D, D), "mlp/c_fc": (D, 4 * D), "mlp/c_proj": (4 * D, D)}
        for name, (fan_in, fan_out) in sizes.items():
            values |= {f"{prefix}{name}/w": normal(1, fan_in, fan_out), f"{prefix}{name}/b": normal(fan_out)}
    values |= {"model/ln_f/g": gain(), "model/ln_f/b": normal(D)}
    save(out / "model.ckpt", values)
    hparams = {"n_vocab": V, "n_ctx": C, "n_embd": D, "n_head": H, "n_layer": L}
    (out / "hparams.json").write_text(json.dumps(hparams))
    reader = tf.train.load_checkpoint(str(out / "model.ckpt"))
    names = reader.get_variable_to_shape_map()
    np.savez(out / "expected.npz", **{name.replace("/", "|"): reader.get_tensor(name) for name in names})

    odd = {
        "half": normal(3, 5).astype(np.float16),
        "brain": normal(4, 6).astype(ml_dtypes.bfloat16),
        "step": np.int64(7),
    }
    save(out / "odd.ckpt", odd, sharded=True)
    with tf1.Graph().as_default(), tf1.Session() as session:
        split = tf1.fixed_size_partitioner(2)
        parted = tf1.get_variable("parted", shape=(6, 4), partitioner=split, initializer=tf1.ones_initializer())
        session.run(tf1.global_variables_initializer())
        tf1.train.Saver([parted]).save(session, str(out / "parted.ckpt"), write_meta_graph=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
