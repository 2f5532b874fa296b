@echo off
rem Runs the tests.   test.bat [pytest options]
setlocal disabledelayedexpansion
set "LR_FILE=%~f0"
set "LR_DO=test"
set LR_ARGS=%*
"%~dp0_run.bat"
