"""Communication between ranks: point-to-point messages, collectives, the handshake before them, and byte counts."""
