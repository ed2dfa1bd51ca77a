"""An attacker beside a second client: what one sends must not be felt by the other, nor by the processes."""
