"""Host: masters and moments, in memory and on NVMe, and the Adam that updates them."""
