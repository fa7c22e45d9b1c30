"""What has drifted? Loops over keys that look and ask; nothing here writes but by claims, nor touches what another role owns."""
