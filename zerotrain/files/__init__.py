"""Files as the whole house reads them, and output as it writes it, without torch or another part of the house."""
