"""Controllers: level-triggered loops that propose corrections as claims."""
