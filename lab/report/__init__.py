"""Tables, figures and pages of rows."""
