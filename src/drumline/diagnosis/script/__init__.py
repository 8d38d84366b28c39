"""A clock for a user's own loop: `clock = drumline.clock(loader, model, optimizer)`."""
