"""What runs inside gdb (`kestrel_gdb`, loaded by gdb itself), and what starts a gdb with it."""
