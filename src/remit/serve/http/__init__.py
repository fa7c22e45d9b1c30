"""HTTP framework: routing, parsing, limits, streaming, API description."""
