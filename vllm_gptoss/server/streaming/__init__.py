"""How streamed text reaches the socket."""
