"""Authentication, authorization checks, agent enrollment, secret sealing."""
