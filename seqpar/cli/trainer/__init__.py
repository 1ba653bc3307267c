"""The trainer behind ``seqpar train`` and ``seqpar demo``: a small language model over bytes, sharded by any strategy.

``config.py`` has the options, ``data.py`` makes the batches, and ``model.py`` is the model. ``world.py`` starts the
ranks together. ``training.py`` is the training loop of one rank, ``checkpoint.py`` saves its state, and ``memory.py``
checks its memory. ``worker.py`` runs the loop, shows its progress, and writes the files with the help of ``report.py``.
"""
