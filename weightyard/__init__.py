"""weightyard: versioned model weights on HDFS, and the fastest way from HDFS onto a device."""
