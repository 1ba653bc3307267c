"""Examples. They are installed as ``seqpar.examples``; ``seqpar demo`` runs ``bytelm.py``."""
