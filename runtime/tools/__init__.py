"""Tool calls: how models write them, read as text arrives, and grammars that force them."""
