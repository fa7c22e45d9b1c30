"""HTTP API server: authentication, authorization, reads, watches, writes as claims. Decides nothing itself."""
