"""Rules for jobs with codecs: which are used, and what follows when their memory is lost."""
