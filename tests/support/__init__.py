"""What several test modules share. Tests import from here and from their own folder, never from another test."""
