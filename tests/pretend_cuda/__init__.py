"""Pretend CUDA cards: the CUDA build of torch on a machine without a GPU. See README.md in this folder."""
