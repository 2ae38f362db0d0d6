"""What the tools write with: files, tables, figures and provenance; imports no tool."""
