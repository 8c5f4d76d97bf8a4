"""How the bundled tiny checkpoint was made: its text, its tokenizer, its training and its export."""
