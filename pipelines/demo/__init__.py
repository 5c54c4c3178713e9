"""The bundled tiny target, its conversations, and the demo that takes them through the whole pipeline."""
