"""One module per command: parse arguments, call one function, print, return an exit code."""
