"""MEMOIR: multi-class SVM with inexact margins."""
