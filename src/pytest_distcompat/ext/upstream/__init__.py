"""What is for the stack itself: releases side by side, and which of them changed a verdict."""
