"""``seqpar bench``: its cases (``cases.py``), the attentions that it compares (``attempts.py``, ``peers.py``), how they
are measured (``measure.py``, ``timeline.py``), and what is printed and drawn (``results.py``, ``charts.py``).
"""
