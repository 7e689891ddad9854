"""From files to token ids and labels: `load.py` reads rows, `chat.py` turns them into tokens."""
