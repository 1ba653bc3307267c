"""How layers mix tokens in other ways than attention to all keys: mixers, indexers, and latent or shared keys."""
