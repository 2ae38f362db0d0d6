"""Running statistics that can be trusted: kept, repaired, watched and examined."""
