"""Takes torch out of what the build asks for, as vLLM's script of this name does; this source asks for none."""
