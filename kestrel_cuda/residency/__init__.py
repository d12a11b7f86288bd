"""Which weights are on the device, and for how long. A window changes where bytes are, never what is computed."""
