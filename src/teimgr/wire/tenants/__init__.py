"""Tenants: what an API key may use, what it has used, and the file in which the processes of a host count it."""
