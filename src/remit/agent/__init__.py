"""The node's side: carries out orders, reports ends, stops itself when cut off. Forbidden: starting before its `start` is true."""
