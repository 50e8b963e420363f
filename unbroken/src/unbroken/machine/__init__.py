"""What this machine has, and what makes it fast: devices, threads, memory."""
