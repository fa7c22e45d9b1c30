"""What has drifted? Loops over keys that look and ask; nothing here writes but by claims, or touches what others own."""
