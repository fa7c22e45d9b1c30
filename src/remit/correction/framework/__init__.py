"""Controller framework: loop, work queue, actions and permissions."""
