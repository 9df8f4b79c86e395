"""What compilers capture of a program, what they make faster, and what they get wrong."""
