"""The node's side: carries out orders, tells ends, stops itself when cut off. Nothing starts before its own `start` is true."""
