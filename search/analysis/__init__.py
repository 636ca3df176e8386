"""What trials say: the front, how sure it is, which scaling rule holds, and the models behind it."""
