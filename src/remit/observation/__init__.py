"""Watch caches and scheduler views, with revision and age. Never writes."""
