"""Controllers: level-triggered loops that compare desired with actual state and submit corrections as claims."""
