"""Communication between ranks: point-to-point, collectives, the handshake before them, and what is counted."""
