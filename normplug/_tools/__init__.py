"""Running statistics that can be trusted: frozen, measured anew, watched and examined."""
