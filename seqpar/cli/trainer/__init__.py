"""The trainer behind ``seqpar train`` and ``seqpar demo``: a small language model over bytes, sharded by any strategy.

``config.py`` holds the options, ``data.py`` the batches and ``model.py`` the model. ``world.py`` starts the ranks
together. ``training.py`` is the loop of one rank, ``checkpoint.py`` what it saves, ``memory.py`` what it needs.
``worker.py`` runs the loop, shows its progress and writes what ``report.py`` formats.
"""
