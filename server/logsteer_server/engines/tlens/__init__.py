"""The TransformerLens engine: any activation of any layer can be steered and captured."""
