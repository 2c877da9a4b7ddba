"""Models on the Hugging Face Hub, named where a path may be: looked up, looked into, fetched, streamed, and uploaded.

``huggingface_hub`` does the work and is imported only when a name is one of a repository: its cache, its token, its
endpoint and its environment hold here. What a name means is :mod:`convert.hub.names`, which files are wanted
:mod:`convert.hub.selection`; :func:`convert.hub.place.place` turns a name into a folder that everything else can open.
"""
