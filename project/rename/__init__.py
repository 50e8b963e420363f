"""Making a clone one's own: another name, without some features, and with later changes."""
