"""Tenants: their quotas as the workers of this host see them, and what they have used, kept across restarts."""
