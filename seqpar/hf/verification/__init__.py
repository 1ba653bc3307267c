"""``verify``: a parallelized model compared with itself on one device."""
