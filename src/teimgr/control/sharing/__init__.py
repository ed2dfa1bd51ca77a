"""Tenants: quotas shared with the workers of this host, usage kept across restarts, and places for instances."""
