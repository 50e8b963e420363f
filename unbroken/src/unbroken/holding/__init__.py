"""What objects hold: the one walk over them, and its bounds."""
