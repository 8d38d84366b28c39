"""What the guards of Drumline's own loop need on the device: the check for finite gradients, and fingerprints."""
