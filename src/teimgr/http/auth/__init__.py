"""Authentication and authorisation: keys, client certificates, and the policy that both ports apply."""
